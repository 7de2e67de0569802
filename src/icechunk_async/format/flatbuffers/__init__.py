"""FlatBuffers by columns, for files with millions of tables.

`buffer` checks and views the bytes, `reading` reads one field of many tables at once, `single` many
fields of one table. `writing` lays files out by columns or in blocks, `splicing` copies tables from
one file to another.
"""
