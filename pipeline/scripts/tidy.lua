#!lua flags=allow-oom
-- Deletes the names of consumers that died: guarantees that each of them holds nothing in the moment in which it goes.
-- Deleting a consumer that holds entries would make them unclaimable for ever. One that lives and is only quiet gets
-- its name back with its next read.
--
-- KEYS  streams
-- ARGV  group, handback consumer, idle_ms, then the names of consumers that live
-- reply the number of names deleted
local group, handback, idle_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lives = { [handback] = true }
for i = 4, #ARGV do
  lives[ARGV[i]] = true
end

local function fields_of(row)
  local fields = {}
  for i = 1, #row, 2 do
    fields[row[i]] = row[i + 1]
  end
  return fields
end

local num_deleted = 0
for _, stream in ipairs(KEYS) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
  for _, row in ipairs(consumers.err and {} or consumers) do -- nobody has read it yet
    local consumer = fields_of(row)
    if not lives[consumer.name] and consumer.pending == 0 and consumer.idle > idle_ms then
      redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer.name)
      num_deleted = num_deleted + 1
    end
  end
end
return num_deleted
