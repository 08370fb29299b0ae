"""Latent attention (MLA): one vector for each token, which all heads read as K and as V."""
