"""Where rows and chunks lie along the dimensions of arrays; pure."""
