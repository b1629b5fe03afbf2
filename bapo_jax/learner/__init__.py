"""How the policy improves: score, credit, packing, log-probs, objective, the jitted update."""
