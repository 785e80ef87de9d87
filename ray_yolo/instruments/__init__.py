"""What looks at data sets and runs from outside. Nothing below imports the room.

The commands use the modules that `__all__` names, and load one only when it runs: some need torch.

| module | subject |
|---|---|
| `dataset_check`, `dataset_changes` | `checks --data`: what a training would read; what has changed since a version |
| `replay` | one step of a recorded run, trained again; `probe` looks into it |
| `bug_report` | `checks`: versions, devices, cluster and storage |
"""

__all__ = ["bug_report", "dataset_changes", "dataset_check", "replay"]
