"""Plans of training runs: everything decided before anything is allocated."""
