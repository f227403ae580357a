"""The mathematics: tensors and modules in, masks, subnetworks and proofs out. Knows no data sets and no files."""
