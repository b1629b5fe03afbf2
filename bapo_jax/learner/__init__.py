"""How the policy improves: advantages, packing, log-probs, the loss kernel, the jitted update."""
