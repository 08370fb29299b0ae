export LAB_SECONDS=42
exec timeout -k 1 46 python3 lab.py
