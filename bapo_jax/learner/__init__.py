"""Policy improvement: scoring, credit, packing, log-probs, objective, and the jitted update."""
