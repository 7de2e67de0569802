"""Keeping repositories healthy, behind the upkeep methods of `Repository` and Spark's jobs.

`survey` reads snapshots and manifests in bounded memory and `sweep` deletes while listing;
`collect`, `check`, `compact`, `rewrite`, `statistics` and `inspect` are one operation each;
`copying`, `integrity` and `migration` have a folder.
"""
