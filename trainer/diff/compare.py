"""Compare two runs: settings, versions, images, logged lines, rows and weights, and say where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer.config.changes import plain_settings
from trainer.config.schema import METHODS, Config
from trainer.config.setting import all_settings, shapes_result
from trainer.diff.rows import RowDifference, RowsOfRun, first_row_difference
from trainer.diff.sides import Side
from trainer.diff.weights import WeightsResult, compare_checkpoints
from trainer.run.digests import training_values

_SHOWN = 10  # lines of one kind that the text shows


class _Lines(NamedTuple):
    """Result of comparing the logged lines."""

    metrics: dict[str, dict[str, Any]]
    """As in `Comparison`."""
    equal: list[int]
    """Steps with the same line in both runs, before any line that differs."""
    equal_rows: int
    """Step of the last line up to which the digests of the rows are equal; 0: none."""
    notes: list[str]


@dataclass
class Comparison:
    """Result of `compare_runs`."""

    settings: list[dict[str, Any]]
    """Settings that differ: key, a, b, changes_result."""
    environment: list[dict[str, Any]]
    """Commit, hardware and versions that differ: key, a, b, each as a list of [first step, value]."""
    data: dict[str, Any] | None
    """Fingerprint and number of images of both runs, if they differ."""
    metrics: dict[str, dict[str, Any]]
    """By name, the first logged step at which a value differs, with both values."""
    equal_lines: list[int]
    """Steps with the same line in both runs, before any line that differs."""
    weights: WeightsResult
    row: RowDifference | None = None
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and other remarks."""

    @property
    def parts_at(self) -> int | None:
        """Step at which the first difference was seen, in number of updates; None: no difference."""
        seen = [entry["step"] for entry in self.metrics.values()]
        if self.weights.different is not None:
            seen.append(self.weights.different)
        return min(seen, default=None)

    @property
    def identical_to(self) -> int:
        """The last step at which lines or checkpoints are known to be identical, and nothing differed before; 0: none."""
        known = [*self.equal_lines, *self.weights.same]
        # A later equality says nothing after the first difference.
        end = self.parts_at
        before_end = [step for step in known if end is None or step < end]
        return max(before_end, default=0)

    @property
    def nothing_compared(self) -> bool:
        """Whether the runs have neither a logged step nor a checkpoint in common."""
        return self.parts_at is None and self.identical_to == 0

    @property
    def is_different(self) -> bool:
        """Whether the runs differ in a result, in the images or in a setting that changes the result."""
        return self.parts_at is not None or self._has_other_rows

    @property
    def _result_settings(self) -> list[str]:
        return [entry["key"] for entry in self.settings if entry["changes_result"]]

    @property
    def _has_other_rows(self) -> bool:
        """Whether settings or images differ that decide which rows are shown."""
        return self.data is not None or bool(self._result_settings)

    def _joined(self) -> str:
        """Join cause and effect: "so" only if the cause decides which rows are shown, and they differ."""
        conjunction = "and"
        if self.row is not None and (self._has_other_rows or self.row.skipped):
            conjunction = "so"
        return f"{self._cause()}, {conjunction} {self._effect()}"

    def _cause(self) -> str:
        """Name the differences that may be the cause: the first kind that there is."""
        # A skipped image explains the rows better than any setting.
        if self.row is not None and self.row.skipped:
            return f"only {self.row.skipped['run']} skipped image {self.row.skipped['id']}"
        # The most likely cause comes first.
        kinds = [
            self._result_settings,
            ["the set of training images"] if self.data else [],
            [entry["key"] for entry in self.environment],
            [entry["key"] for entry in self.settings],
        ]
        for names in kinds:
            if names:
                listed = ", ".join(names[:3])
                more = f" and {len(names) - 3} others" if len(names) > 3 else ""
                verb = "differ" if len(names) > 1 else "differs"
                return f"{listed}{more} {verb}"
        return "no setting, version or training image differs"

    def _effect(self) -> str:
        """Say what the first difference looks like."""
        if self.row is not None:
            shown = f"image {self.row.a} instead of {self.row.b}"
            if self.row.view is not None:
                shown = f"view {self.row.view} with {self.row.value} {self.row.a} instead of {self.row.b}"
            return f"the plan's row {self.row.row} of step {self.row.step} shows {shown}"
        for name, entry in self.metrics.items():
            # A digest says nothing to a reader, and later differences follow from the first one.
            if entry["step"] == self.parts_at and name != "rows_digest":
                return f"{name} is {entry['a']} instead of {entry['b']}"
        # No logged value differs yet, but a checkpoint does.
        if self.weights.different == self.parts_at and self.weights.tensors:
            return f"the checkpoint of step {self.parts_at} differs first in {self.weights.tensors[0].name}"
        return "the rows differ"

    def verdict(self) -> str:
        """Say in one sentence or two where the runs part."""
        step = self.identical_to
        # Settings can still differ, even if no result can be compared.
        if self.nothing_compared:
            cause = f": {self._cause()}" if self.is_different else ""
            return f"The runs have no logged step and no checkpoint in common, so no result can be compared{cause}."
        if self.parts_at is None:
            cause = f", though {self._cause()}" if self.is_different else ""
            return f"The runs are identical up to step {step}, the last one that can be compared{cause}."
        begin = f"The runs are identical up to step {step}. " if step else ""
        # A mean of one step names the step; one of several steps only names their range.
        place = f"between steps {step + 1} and {self.parts_at}"
        if step + 1 == self.parts_at:
            place = f"at step {self.parts_at}"
        return f"{begin}They part {place}: {self._joined()}."


def compare_runs(a: Side, b: Side) -> Comparison:
    """Compare all that the files of two runs tell."""
    lines = _compare_lines(a, b)
    found = Comparison(
        settings=_different_settings(a.config, b.config),
        environment=_different_environment(a, b),
        data=_different_data(a, b),
        metrics=lines.metrics,
        equal_lines=lines.equal,
        weights=compare_checkpoints(a.checkpoints, b.checkpoints),
        notes=lines.notes,
    )
    # The digests tell between which lines the rows began to differ.
    if "rows_digest" in lines.metrics:
        _compare_rows(a, b, lines.equal_rows, lines.metrics["rows_digest"]["step"], found)
    elif lines.metrics and not _comparable_digests(a, b):
        # Without digests, any difference may come from the rows.
        assert found.parts_at is not None
        _compare_rows(a, b, max(lines.equal, default=0), found.parts_at, found)
    for side in (a, b):
        found.notes += [f"{side.name}: {problem}" for problem in side.problems]
    return found


def _different_settings(a: Config, b: Config) -> list[dict[str, Any]]:
    """List the settings that differ, those that change the result first. The run folder always differs."""
    ours = plain_settings(a)
    theirs = plain_settings(b)
    found = []
    for key, declared, _ in all_settings(a):
        # Equal settings and the folders need no mention.
        if key == "run_dir" or ours[key] == theirs[key]:
            continue
        section = key.partition(".")[0]
        is_used = section not in METHODS or section in (a.method, b.method)
        # A resumed run may change init_from, because only the first start reads it. Two runs begin with other weights by it.
        is_decisive = shapes_result(declared) or key == "init_from"
        found.append(
            {
                "key": key,
                "a": ours[key],
                "b": theirs[key],
                "changes_result": is_decisive and is_used,
            }
        )
    # Sorting is stable, so each part keeps the order of the schema.
    return sorted(found, key=lambda entry: not entry["changes_result"])


def _different_environment(a: Side, b: Side) -> list[dict[str, Any]]:
    """List commit, hardware and versions that differ, in the order of the first run, then those of the other run only."""
    ours = a.environment()
    theirs = b.environment()
    found = []
    # A package may be installed on one side only.
    for key in dict.fromkeys([*ours, *theirs]):
        history_a = ours.get(key, [])
        history_b = theirs.get(key, [])
        # The steps of restarts do not matter, only the values.
        values_a = [value for _, value in history_a]
        values_b = [value for _, value in history_b]
        if values_a != values_b:
            found.append(
                {
                    "key": key,
                    "a": history_a,
                    "b": history_b,
                }
            )
    return found


def _different_data(a: Side, b: Side) -> dict[str, Any] | None:
    # Without a fingerprint nothing can be said.
    if not a.data or not b.data or a.data["fingerprint"] == b.data["fingerprint"]:
        return None
    return {"a": a.data, "b": b.data}


def _comparable_digests(a: Side, b: Side) -> bool:
    """Return whether both runs have digests, which began at the same step."""
    for side in (a, b):
        if not any("rows_digest" in line for line in side.lines):
            return False
    return a.digests_since == b.digests_since


def _compare_lines(a: Side, b: Side) -> _Lines:
    """Find the first difference of each value in the lines of the steps that both runs have logged."""
    notes = []
    digests = _comparable_digests(a, b)
    if not digests:
        notes.append("rows_digest is not compared, because a run has none or its digests began at another step")
    # A line holds means since the line before it, so both steps identify its interval.
    ours = dict(_with_line_before(a.lines))
    theirs = dict(_with_line_before(b.lines))
    metrics: dict[str, dict[str, Any]] = {}
    equal_lines = []
    equal_rows = 0
    has_other_intervals = False
    for step in sorted(ours.keys() & theirs.keys()):
        before_a, line_a = ours[step]
        before_b, line_b = theirs[step]
        values_a = training_values(line_a)
        values_b = training_values(line_b)
        names = [name for name in values_a if name in values_b]
        if not digests and "rows_digest" in names:
            names.remove("rows_digest")
        # Means over other intervals differ in equal runs.
        has_same_interval = before_a == before_b
        if not has_same_interval:
            has_other_intervals = True
            names = [name for name in names if name in ("rows_digest", "lr")]
        different = [name for name in names if values_a[name] != values_b[name]]
        # The rows decide everything else, and the loss is what most readers look for.
        different.sort(key=lambda name: (name != "rows_digest", name != "loss"))
        for name in different:
            values = {
                "step": step,
                "a": values_a[name],
                "b": values_b[name],
            }
            metrics.setdefault(name, values)
        if not metrics and has_same_interval:
            equal_lines.append(step)
        if "rows_digest" in names and "rows_digest" not in metrics:
            equal_rows = step
    if has_other_intervals:
        notes.append(
            "some lines are means over other steps (log.every_steps), so only rows and learning rate are compared"
        )
    return _Lines(metrics, equal_lines, equal_rows, notes)


def _with_line_before(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[int, tuple[int, dict[str, Any]]]]:
    """Yield (step, (step of the line before, line)) of each line."""
    before = 0
    for line in lines:
        yield line["step"], (before, line)
        # The next line covers the steps after this one.
        before = line["step"]


def _compare_rows(a: Side, b: Side, first: int, end: int, found: Comparison) -> None:
    """Draw the rows of the steps first <= step < end again, and note where they differ."""
    different = [entry["key"] for entry in found.settings]
    for key in ("data.images_per_step", "views.num_views"):
        if key in different:
            found.notes.append(f"rows are not compared one by one, because {key} differs")
            return
    if not (a.knows_images and b.knows_images):
        found.notes.append("rows are not compared one by one, because the number of training images is unknown")
        return
    # Both plans are drawn once, for the search and for the digests.
    rows_of_a = RowsOfRun(a)
    rows_of_b = RowsOfRun(b)
    found.row = first_row_difference(rows_of_a, rows_of_b, first, end)
    for rows in (rows_of_a, rows_of_b):
        if _trained_on_others(rows, first, end):
            found.notes.append(
                f"{rows.side.name} did not train on the rows that its files give for steps {first} to {end - 1}: its "
                "settings, its images, quarantine.jsonl or the program were others then"
            )


def _trained_on_others(rows: RowsOfRun, first: int, end: int) -> bool:
    """Return whether the logged digests show other rows in the steps first <= step < end; False if they do not tell."""
    logged = {line["step"]: line.get("rows_digest") for line in rows.side.lines}
    at_first = "0" if first == 0 else logged.get(first)
    at_end = logged.get(end)
    if at_first is None or at_end is None or rows.side.digests_since > first:
        return False
    expected = rows.digest(first, end)
    # A digest is a sum over all steps, so a difference belongs to the steps between two lines.
    try:
        found = (int(at_end, 16) - int(at_first, 16)) % 2**64
    except (TypeError, ValueError):  # a damaged line may hold anything
        return False
    return expected is not None and found != expected


def describe(a: Side, b: Side, found: Comparison) -> Iterator[str]:
    """Yield the comparison as text."""
    yield f"A: {a.folder}"
    yield f"B: {b.folder}"
    yield from _listed("settings", [_setting_line(entry) for entry in found.settings])
    yield from _listed("versions, commit and hardware", [_environment_line(entry) for entry in found.environment])
    if found.data:
        parts = []
        for name, data in found.data.items():
            parts.append(f"{name.upper()} {data['images']} images ({data['fingerprint']})")
        yield from _listed("training images", [", ".join(parts)])
    else:
        what = "the same" if a.data and b.data else "unknown"
        yield f"training images: {what}"
    yield from _listed("logged values, first difference", [_metric_line(*item) for item in found.metrics.items()])
    if found.row:
        yield f"rows: {found.row.describe()} (`wmse plan --step {found.row.step}` shows all its choices)"
    yield from _describe_weights(found.weights)
    for note in found.notes:
        yield f"note: {note}"
    yield found.verdict()


def _describe_weights(weights: WeightsResult) -> Iterator[str]:
    if not weights.common:
        yield "checkpoints: none in common"
    else:
        steps = ", ".join(map(str, weights.common))
        same = "none is bit-identical"
        if weights.identical is not None:
            same = f"bit-identical at step {weights.identical}"
        yield f"checkpoints in common: steps {steps}; the last one that is the same: {same}"
    if weights.different is not None:
        lines = [tensor.describe() for tensor in weights.tensors]
        yield from _listed(f"tensors of step {weights.different}", lines)


def _listed(title: str, lines: Sequence[str]) -> Iterator[str]:
    if not lines:
        yield f"{title}: no difference"
        return
    plural = "" if len(lines) == 1 else "s"
    yield f"{title}: {len(lines)} difference{plural}"
    # A text is for people; the JSON has everything.
    for line in lines[:_SHOWN]:
        yield f"  {line}"
    if len(lines) > _SHOWN:
        yield f"  ... and {len(lines) - _SHOWN} more (--json lists all)"


def _setting_line(entry: dict[str, Any]) -> str:
    mark = "" if entry["changes_result"] else "  (cannot change the result, at most its rounding)"
    return f"{entry['key']}: {entry['a']} -> {entry['b']}{mark}"


def _environment_line(entry: dict[str, Any]) -> str:
    return f"{entry['key']}: {_history(entry['a'])} -> {_history(entry['b'])}"


def _history(values: Sequence[tuple[int, Any]]) -> str:
    """Return the values of all starts, with the steps at which they changed."""
    if not values:
        return "unknown"
    # The first value holds from the beginning, so its step need not be named.
    _, first_value = values[0]
    texts = [str(first_value)]
    for step, value in values[1:]:
        texts.append(f"from step {step} on {value}")
    return ", ".join(texts)


def _metric_line(name: str, entry: dict[str, Any]) -> str:
    return f"{name}: at step {entry['step']}, {entry['a']} -> {entry['b']}"
