"""This process among all of the job: ranks, process groups, devices, collectives."""
