"""The values of the official package: their looks, their conversion, and their kinds.

`display`, `mirrors` and `variants` hold the parts that all values share. `sections`, `containers`,
`conditions` and `configuration` are the configuration; `states` are small values; `about` holds
versions and logs. Users find these classes in the public modules of `icechunk_async.sync`.
"""
