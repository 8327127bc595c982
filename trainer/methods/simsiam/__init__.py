"""SimSiam: predicts the embedding of another view, without a target network and without negatives."""
