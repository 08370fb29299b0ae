"""Writes a model anew in four bits a weight, rounded by what its matrices are multiplied with."""
