"""Differential privacy for client samples: noise mechanisms, accounting, and the budget ledger."""
