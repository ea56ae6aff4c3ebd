"""The jobs of the pipeline. Spark schedules and shuffles; what is done to a partition or a blob is what the services
do, by their code.
"""
