"""Read and write FlatBuffers by columns, for files with millions of tables."""
