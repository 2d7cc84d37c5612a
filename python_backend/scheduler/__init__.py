"""Which requests run which rows in the next step: policy, admission and budget. No torch."""
