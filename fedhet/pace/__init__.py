"""When rounds close, who is asked, and what late answers are worth: rules without a network."""
