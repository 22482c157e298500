/* Each clause that prints something, or has no statement, is a line. */

BEGIN
{
}

BEGIN
{
	trace("text");
	trace(-5);
	trace((int64_t)-5);
	trace((uint64_t)5);
	trace((uint8_t)200);
	trace((int16_t)-200);
}

BEGIN
{
	printf("%d and %s", 5, "five");
	printf("\nanother line\n");
}

BEGIN
{
	@a["key"] = count();
}

BEGIN
{
	printa(@a);
	printa("%s: %@d", @a);
}

BEGIN
{
	exit(0);
}
