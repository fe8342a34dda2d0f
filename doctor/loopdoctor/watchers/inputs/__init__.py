"""What is fed in: data, pictures, ids, and targets beside them."""
