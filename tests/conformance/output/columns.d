/* Keys have columns by their type, results have 16. By result, then key. */
#pragma D option quiet

BEGIN
{
	@byname["postgres", (long long)7] = sum(512);
	@byname["psql", (long long)-7] = sum(4711);
	@byname["autovacuum launcher", (long long)7] = sum(-3);
	@byname["autovacuum", (long long)7] = sum(-3);
	@sizes[(int8_t)-1, (int16_t)-1, (int32_t)-1, (uint32_t)4000000000] = count();
	@total = count();
	@total = count();
	@average = avg(-7);
	@average = avg(0);
	@least = min(9);
	@least = min(-9);
	@greatest = max(9);
	@greatest = max(-9);
	@deviation = stddev(10);
	@deviation = stddev(20);
	exit(0);
}
