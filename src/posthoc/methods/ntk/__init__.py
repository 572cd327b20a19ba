"""Methods made of the neural tangent kernel: ELLA and VaLLA."""
