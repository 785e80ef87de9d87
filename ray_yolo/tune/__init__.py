"""Studies: sweeps and comparisons of recipes, of which each training is one of the trainer's.

The room stands outside the trainer: nothing that trains imports it. Other rooms use the modules that `__all__` names.
The door imports none of them: `python -m ray_yolo.tune` passes it before signals are handled, and some load Ray.

| module | subject |
|---|---|
| `search`, `compare_settings`, `sides` | settings of a sweep, of a comparison; the two recipes that are compared |
| `tuner`, `comparer` | a whole sweep, a whole comparison, and their dry runs |
| `compared` | the numbers of both sides of a comparison |
| `records`, `verification` | the records of a study, completed; its files and decisions, checked again |
| `status`, `listing` | what is shown of a study or a run; of all that a project has |
"""

__all__ = ["compare_settings", "compared", "comparer", "listing", "records", "search", "sides", "status", "tuner",
           "verification"]
