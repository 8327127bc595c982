"""SimCLR: the contrastive loss with in-batch negatives."""
