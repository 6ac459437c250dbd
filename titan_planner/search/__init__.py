"""The search for the best plan: its space, prices of candidates, bounds, and the optimum."""
