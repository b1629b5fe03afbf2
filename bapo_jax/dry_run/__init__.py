"""What a run would need, and whether it fits: `train --dry_run`."""
