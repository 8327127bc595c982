# Sourced by run.sh, which sets: out (folder), python, only (names with commas, or empty), end_seconds, and patience (how
# many times each limit holds; 1 if not set).
# part NAME SECONDS NEEDS COMMAND... runs a command for SECONDS at most; what it says goes to OUT/NAME.txt.
#   NEEDS: Python modules with commas, or -; the part is skipped, and says so, where one is missing.
#   Exit code 77 means that it cannot run here. Nothing stops the parts that follow.
# finish joins the results in OUT/results.json and prints the table; its status is 1 if any part failed.

known=() names=() states=() times=() notes=()

part() {
    local name=$1 limit=$(($2 * ${patience:-1})) needs=$3 left=$((end_seconds - SECONDS)) began=$SECONDS missing= code=0
    shift 3
    known+=("$name")
    [[ -n $only && ",$only," != *",$name,"* ]] && return
    if [[ $needs != - ]]; then missing=$("$python" tests/gpu/packages.py ${needs//,/ }); fi
    if ((left < 5)); then
        record "$name" "NOT RUN" 0 "no time left of $end_seconds s"
        return
    elif [[ -n $missing ]]; then
        record "$name" skipped 0 "missing: $missing"
        return
    fi
    ((limit > left)) && limit=$left
    echo "== $name" >&2
    timeout -k 10 "$limit" "$@" >"$out/$name.txt" 2>&1 || code=$?
    case $code in
        0) record "$name" ok $((SECONDS - began)) "$(last_words "$name")" ;;
        77) record "$name" skipped $((SECONDS - began)) "$(last_words "$name")" ;;
        124) record "$name" "OVER TIME" $((SECONDS - began)) "stopped after $limit s; $out/$name.txt has what it said" ;;
        *) record "$name" "FAILED ($code)" $((SECONDS - began)) "$(last_words "$name")" ;;
    esac
}

record() { names+=("$1") states+=("$2") times+=("$3") notes+=("$4"); }

last_words() { # the last line of a part that is no JSON
    grep -v -e '^{' -e '^[[:space:]]*$' "$out/$1.txt" | tail -n 1 | cut -c 1-200
}

finish() {
    local i name failed=0
    for name in ${only//,/ }; do
        [[ " ${known[*]} " == *" $name "* ]] || record "$name" "NOT RUN" 0 "there is no such part; there are: ${known[*]}"
    done
    for i in "${!names[@]}"; do
        case ${states[i]} in ok | skipped) ;; *) failed=1 ;; esac
    done
    "$python" tests/gpu/merge.py "$out" "${names[@]}" || failed=1
    {
        printf '%-23s %-12s %5s  %s\n' part result s "what it says"
        for i in "${!names[@]}"; do
            printf '%-23s %-12s %5s  %s\n' "${names[i]}" "${states[i]}" "${times[i]}" "${notes[i]}"
        done
        printf '%s s in all\n' "$SECONDS"
    } | tee "$out/table.txt"
    return $failed
}
