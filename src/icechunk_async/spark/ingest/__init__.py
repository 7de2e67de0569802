"""Turn files of other formats into virtual references: one task a file, one commit for all."""
