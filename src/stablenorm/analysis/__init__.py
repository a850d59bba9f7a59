"""Instruments that describe data and cost: they take arrays and functions."""
