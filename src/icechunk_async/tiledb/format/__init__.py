"""The files of TileDB arrays: bytes to values. Pure, no I/O.

`schema` and `fragment` read what arrays and fragments are made of, `tiles` undoes the `filters` of
tiles, `history` decides what a reader sees at a time, `metadata`, `conditions` and `commits` read
the smaller files. Format versions 4 to 22 are read; bytes are untrusted, and any fault in them is a
`FormatError`.
"""
