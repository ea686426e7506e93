"""The step loop of a rank, and `Engine`, which runs it inside one process. Knows neither MPI nor grpc."""
