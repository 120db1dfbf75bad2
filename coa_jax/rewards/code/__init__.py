"""Rewards for programs: hidden tests, run in the jail."""
