-- Shared by the scripts that end requests; the loader puts it where they say `-- include: ending.lua`.
local ENDED = { finished = true, failed = true, cancelled = true }

local BATCH_OVER = { completed = true, failed = true, cancelled = true, expired = true }

-- Writes the terminal entry: nothing can follow it, and all that is left of the request has a TTL. A line of a
-- batch that goes on has one only after its batch has collected it (batch_collected.lua); until then the batch's
-- own stream remembers it. Whose line it is stands in the request's state, and so do the names of what holds its
-- credit and its deadline, since whoever ends a request knows of none of these. A batch that goes on after a failure
-- feeds its lines again: one that it has not come to yet is found by batch_feed.lua, and must not be in the stream
-- twice.
local function end_request(r, terminal, state, finished, result_ttl_s, max_finished)
  redis.call('XADD', r.results, '1-0', 'p', terminal)
  redis.call('HSET', r.request, 'state', state)
  redis.call('HDEL', r.request, 'plan_priority:' .. r.attempt, 'plan_payload:' .. r.attempt)
  redis.call('DEL', r.chunks)
  local of = redis.call('HMGET', r.request, 'batch', 'line', 'credits', 'deadlines')
  if of[3] then -- its blobs have no owner any more: whoever finds them removes them
    redis.call('HDEL', of[3], r.id)
  end
  if of[4] then
    redis.call('ZREM', of[4], r.id)
  end
  local batch = of[1] and redis.call('HMGET', of[1], 'state', 'cursor') or {}
  if batch[1] and not BATCH_OVER[batch[1]] and tonumber(of[2]) < tonumber(batch[2] or '0') then
    redis.call('XADD', of[1] .. ':done', '*', 'line', of[2])
  else
    redis.call('EXPIRE', r.request, result_ttl_s)
    redis.call('EXPIRE', r.results, result_ttl_s)
  end
  -- Last: a foreign key under this name must not keep what is above for ever.
  redis.call('XADD', finished, 'MAXLEN', '~', max_finished, '*', 'id', r.id, 'p', terminal)
  redis.call('EXPIRE', finished, result_ttl_s)
end
