"""What a session changed, as pure values: merge, move, reshape and detect conflicts without I/O."""
