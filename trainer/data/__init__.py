"""The images on disk, the plan of every random choice, the DALI graph that draws the views, and the loader."""
