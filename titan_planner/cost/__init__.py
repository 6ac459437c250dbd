"""What a plan costs, counted from the contract's values: parameters, FLOPs, memory. Pure functions."""
