"""The jobs of the pipeline. Spark schedules and shuffles; partitions and blobs are processed by the engines' code."""
