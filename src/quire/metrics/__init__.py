"""What is measured, under names that dashboards read: plain data in, Prometheus and others out."""
