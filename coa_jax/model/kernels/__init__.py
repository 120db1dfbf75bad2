"""Attention kernels; outputs have the queries' shape and dtype."""
