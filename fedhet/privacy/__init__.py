"""Differential privacy for client samples: noise mechanisms, accounting, and a budget ledger."""
