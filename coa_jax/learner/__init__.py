"""One batch, one step: shared by SFT and RL."""
