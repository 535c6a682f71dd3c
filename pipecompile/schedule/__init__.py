"""Stages in, schedule out: which rank does what, when; simulated and proven deadlock-free."""
