/* Only what programs print. */
#pragma D option quiet

BEGIN
{
	trace("text");
	trace("\n");
	trace((int64_t)-5);
	trace((uint8_t)200);
	printf("|%5d|%-5x|%05d|%+d|%#o|%5s|%-5s|%.2s|%c\n", 42, 42, 42, 42, 42, "ab", "ab", "abc", 'z');
	printf("%d%% of %s, %?x, %p\n", 5, "all", 0xbeef, 0xbeef);
	@key = count();
	printa(@key);
}

BEGIN
{
	exit(0);
}
