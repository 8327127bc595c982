"""Distributed training: ranks, process groups, devices and collectives."""
