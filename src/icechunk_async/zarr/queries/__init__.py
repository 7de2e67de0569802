"""Query arrays by value: statistics of chunks, conditions, and aggregates that read few chunks.

`meaning` says what stored numbers mean, `measuring` makes statistics of them, `conditions` decides
from bounds or values, `arrays` joins chunks with their statistics; `aggregate` and `analyze` are
what users call.
"""
