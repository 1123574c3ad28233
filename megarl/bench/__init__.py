"""Speed and memory as ratios to a peer, both measured in one run."""
