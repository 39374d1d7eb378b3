#!lua flags=allow-oom
-- Deletes this consumer's name from groups: guarantees that it holds nothing there. Deleting a consumer that
-- holds entries would make them unclaimable for ever.
--
-- KEYS  streams
-- ARGV  consumer, then the group of each stream
local consumer = ARGV[1]
for i, stream in ipairs(KEYS) do
  local group = ARGV[i + 1]
  local pending = redis.pcall('XPENDING', stream, group, '-', '+', 1, consumer)
  if pending.err == nil and #pending == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
  end
end
return 1
