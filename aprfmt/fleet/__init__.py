"""Scans many models: what `validate`, `hash` and `diff --base` say of one, for every one found.

`model_search` finds the models, `questions` is the table of what is asked of each, a task is one
question of one model (`tasks`), `workers` asks them on this machine and `ray_tasks` on a Ray
cluster, `results` stores a row for each answer, `summary` says what the rows say together.
"""
