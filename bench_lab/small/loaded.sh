cd /tmp/clone
for i in 1 2 3 4; do python3 -c "
while True: pass" & B="$B $!"; done
for n in 1 2 3; do
  date -u; ( time make test PYTEST_ARGS=--junitxml=/tmp/junit_l$n.xml ) > /tmp/loaded$n.log 2>&1; echo "run $n rc $?"; tail -6 /tmp/loaded$n.log
done
kill $B
date -u; echo done
