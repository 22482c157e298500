/* Several aggregations in one printa(): by the one at aggsortpos, those without a key's value have 0. */
#pragma D option quiet
#pragma D option aggsortpos=1

BEGIN
{
	@calls["read"] = count();
	@calls["read"] = count();
	@calls["write"] = count();
	@bytes["read"] = sum(100);
	@bytes["write"] = sum(50);
	@bytes["close"] = sum(-1);
	@least["read"] = min(7);
	@sizes["write"] = quantize(8);
	printa(@calls, @bytes, @least);
	printa("%-8s|%@5d|%@-5d|%@x|%@x\n", @calls, @bytes, @least);
	printa("%s%@d%@d\n", @calls, @sizes);
	exit(0);
}
