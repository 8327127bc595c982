"""On a cluster: which rank this process is, how ranks meet, how runs are submitted, watched and stopped."""
