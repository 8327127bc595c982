"""What `wmse bench` measures: loss.py, sweep.py and loader.py are its commands, the others what they share."""
